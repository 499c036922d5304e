"""alternatives"""
